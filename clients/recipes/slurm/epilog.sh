#!/bin/sh
# EpilogSlurmctld=/etc/slurm/tally/slurm/epilog.sh
# A job of Slurm has ended; SLURM_JOB_EXIT_CODE2 is its exit code and the signal that ended it, as 1:0.
PATH=/usr/local/bin:/usr/bin:/bin
[ ! -r /etc/slurm/tally.env ] || . /etc/slurm/tally.env
. "$(dirname "$0")/../shell/record.sh"

cluster=${SLURM_CLUSTER_NAME:-slurm}
ended=${SLURM_JOB_EXIT_CODE2:-0:0}
error=
[ "${ended#*:}" = 0 ] || error="killed by signal ${ended#*:}"
[ "${ended%:*}" = 0 ] || error="exit code ${ended%:*}"
tally_end "slurm.$cluster.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "$cluster" "$error"
exit 0
