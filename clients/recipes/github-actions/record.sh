# What action.yml runs. A runner is gone when its job ends, so there is no spool: what the ledger does not take is said in
# the log of the step, and fails nothing.
. "$(dirname "$0")/../shell/record.sh"

job="github.$GITHUB_RUN_ID.$GITHUB_RUN_ATTEMPT.$GITHUB_JOB.${TALLY_LEG:-0}"
case $TALLY_EVENT in
  begin)
    repository=$(tally_text "$GITHUB_REPOSITORY") workflow=$(tally_text "$GITHUB_WORKFLOW")
    ref=$(tally_text "$GITHUB_REF") by=$(tally_text "$GITHUB_ACTOR")
    spec="{\"repository\":\"$repository\",\"workflow\":\"$workflow\",\"job\":\"$(tally_text "$GITHUB_JOB")\""
    spec="$spec,\"ref\":\"$ref\",\"commit\":\"$GITHUB_SHA\",\"by\":\"$by\"}"
    tally_begin "$job" "$spec" "${RUNNER_NAME:-github}"
    ;;
  end)
    error=
    [ "$TALLY_STATUS" = success ] || error="the job ended as ${TALLY_STATUS:-unknown}"
    tally_end "$job" "${RUNNER_NAME:-github}" "$error"
    ;;
  *) echo "tally: event is begin or end, not $TALLY_EVENT" >&2 ;;
esac
