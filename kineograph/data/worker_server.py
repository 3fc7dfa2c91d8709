"""Imported by the server process that data workers are forked from, and by nothing else.

A signal to the whole process group asks the training process to stop; the server and its workers must outlive it until the
last step is made and saved. They end when the training process closes their pipes, or dies.
"""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
