"""A fit that goes on when ranks die."""
