"""The settings of attention (`spec`) and the bytes that it reads with them (`bytes`)."""
