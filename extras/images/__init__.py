"""Images of rows: files, the text that stands for an image, and pixels; loaded only if rows have
images."""
