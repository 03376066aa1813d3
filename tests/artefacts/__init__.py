"""What is published: the wheels and the sdist."""
