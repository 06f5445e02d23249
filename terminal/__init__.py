"""What the commands of ``tally`` and of ``tally pipeline`` share: two programs, of which neither may import the other.

The service runs where no pipeline is installed, and the pipeline on clusters where there is no service.
"""
