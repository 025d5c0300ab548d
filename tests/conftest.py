"""pytest puts the folder of this file on the import path, so tests say `from builders import …`."""
