"""What is gained on a CUDA device?"""
