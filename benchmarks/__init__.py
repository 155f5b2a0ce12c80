"""The measurements behind the figures that the documents give."""
