"""Finds what each layer of a model needs: the search (`search`) and its measurements (`meter`)."""
