#!/bin/sh
# PrologSlurmctld=/etc/slurm/tally/slurm/prolog.sh
# A job of Slurm begins. Slurm sets no PATH here, and requeues a job whose prolog fails: this one does not fail.
PATH=/usr/local/bin:/usr/bin:/bin
[ ! -r /etc/slurm/tally.env ] || . /etc/slurm/tally.env
. "$(dirname "$0")/../shell/record.sh"

cluster=${SLURM_CLUSTER_NAME:-slurm}
name=$(tally_text "$SLURM_JOB_NAME") user=$(tally_text "$SLURM_JOB_USER")
partition=$(tally_text "$SLURM_JOB_PARTITION") nodes=$(tally_text "$SLURM_JOB_NODELIST")
spec="{\"name\":\"$name\",\"user\":\"$user\",\"partition\":\"$partition\",\"nodes\":\"$nodes\"}"
tally_begin "slurm.$cluster.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" "$spec" "$cluster"
exit 0
