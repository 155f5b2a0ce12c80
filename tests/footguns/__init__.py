"""Each rule of the doctor on its own example, and a real graph that shows the harm."""
