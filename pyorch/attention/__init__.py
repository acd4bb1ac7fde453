"""The settings of attention (`spec`), their one-line form (`line`), what `calibrate` found for a
model (`saved`), and the bytes that a token reads (`cost`)."""
