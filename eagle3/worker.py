"""Placeholder until capture lands."""
class CaptureWorker:
    pass
