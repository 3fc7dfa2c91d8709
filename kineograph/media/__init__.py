"""Frames to GIF, MP4, PNG, grids, film strips and curves."""
