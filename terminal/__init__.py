"""Code shared by ``tally`` and ``tally pipeline``: two programs, of which neither may import the other. The service
runs without an installed pipeline, and the pipeline on clusters without a service.
"""
