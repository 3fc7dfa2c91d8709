"""The web page over run folders (`kineo studio`) and the same as one file (`kineo report`). Reads files; torch is imported only to draw."""
