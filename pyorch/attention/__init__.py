"""What attention reads: the settings (`spec`) and the bytes they cost (`bytes`)."""
