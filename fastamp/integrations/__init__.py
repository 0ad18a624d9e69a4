"""What single libraries need besides `fastamp.patch()` to make full use of fastamp. Import the one you need."""
