"""What takes the time of a token?"""
