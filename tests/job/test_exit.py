"""What is said of the error that ends a rank."""

import pytest

from lightning_ring.job.exit import in_one_line


def clean_up():
    try:
        raise OSError(28, "No space left on device")
    finally:
        raise RuntimeError("Call iter() first.\nThis loader has none.")


def translate():
    try:
        raise KeyError("photo")
    except KeyError:
        raise ValueError("no such photo") from None


def test_an_error_in_cleaning_up_does_not_hide_the_first_one():
    with pytest.raises(RuntimeError) as caught:
        clean_up()
    line = "RuntimeError: Call iter() first. (after OSError: [Errno 28] No space left on device)"
    assert in_one_line(caught.value) == line


def test_an_error_that_replaces_another_on_purpose_stands_alone():
    with pytest.raises(ValueError, match="no such photo") as caught:
        translate()
    assert in_one_line(caught.value) == "ValueError: no such photo"
