"""The version, in one place: `setup.py` reads this line as text, `flash_qla/__init__.py` imports it."""

__version__ = "0.2.0"
