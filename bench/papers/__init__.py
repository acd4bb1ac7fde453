"""What do the papers' figures and tables look like here?"""
