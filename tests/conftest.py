"""pytest puts the folder of this file on the import path, so tests say `from builders import …`."""

import signal

from hypothesis import settings

# A test says what is right, not how fast a busy machine is.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# A shell ignores Ctrl-C for what it starts with `&`, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
