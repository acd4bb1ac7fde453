"""What do users wait for?"""
