"""Imported only by the server process that data workers are forked from.

A signal to the process group stops the training process; the server and its workers must live until the last step is saved. They exit when
the training process closes their pipes or dies.
"""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
