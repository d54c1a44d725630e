"""The tests of gradclip, one idea a file."""
