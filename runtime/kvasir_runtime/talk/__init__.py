"""What models write besides plain text: thoughts and calls of tools, read from an answer as it comes."""
