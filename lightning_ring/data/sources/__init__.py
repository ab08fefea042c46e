"""Images that lie in the formats of other libraries, as sources of `image_loader`."""
