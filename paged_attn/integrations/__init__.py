"""Drop-ins: the calls of other libraries and engines, served by this package's ops."""
