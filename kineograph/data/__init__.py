"""Sources of samples, decoding, transforms, splits and the loader."""
