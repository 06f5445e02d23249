# Sourced by other scripts: events sent with curl, or left in a spool while the ledger is away (docs/formats/spool.md).
#
#   TALLY_URL  the ledger      TALLY_TENANT  whose jobs      TALLY_SPOOL  folder, flushed by cron: tally-run --flush
#   TALLY_TOKEN  bearer token, may be left out               TALLY_WAIT   seconds for one answer [5]
#
# Nothing here fails the script that calls it: what went wrong is said on standard error.

# tally_text VALUE: as the inside of a JSON string.
tally_text() { printf %s "$1" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g'; }

# tally_begin JOB SPEC DC: SPEC is JSON, the others are plain. DC is where the job runs.
tally_begin() {
  tenant=$(tally_text "$TALLY_TENANT") dc=$(tally_text "$3")
  tally_post begin "$1" /v1/jobs created \
    "{\"tenant_id\":\"$tenant\",\"job_id\":\"$1\",\"spec\":$2,\"assigned_dcs\":[\"$dc\"]}"
  tally_post begin "$1" "/v1/jobs/$1/events" accepted \
    "{\"tenant_id\":\"$tenant\",\"type\":\"JobAccepted\",\"dc_id\":\"$dc\",\"worker_count\":1}"
}

# tally_end JOB DC ERROR: a good end where ERROR is empty.
tally_end() {
  tenant=$(tally_text "$TALLY_TENANT") dc=$(tally_text "$2") error=$(tally_text "$3")
  if [ -z "$3" ]; then
    event='"type":"JobCompleted","final_status":"completed"'
  else
    event="\"type\":\"JobFailed\",\"error\":\"$error\",\"failed_dc\":\"$dc\""
  fi
  tally_post end "$1" "/v1/jobs/$1/events" ended "{\"tenant_id\":\"$tenant\",$event}"
}

# tally_post PART JOB PATH STEP BODY: one request; what of this job waits already goes first, so it waits too.
tally_post() {
  if [ -n "$TALLY_SPOOL" ] && grep -qs "\"job_id\":\"$2\"" "$TALLY_SPOOL"/run-*.json; then
    tally_keep "$@"
    return 0
  fi
  # What ends a line behind the token is no part of it; elsewhere curl would read its rest as an option.
  token=$(printf %s "$TALLY_TOKEN" | tr -d '\r')
  case $token in
    *[[:cntrl:]]*)
      answer="TALLY_TOKEN has a control character inside"
      echo "tally: $answer: nothing is sent" >&2
      tally_keep "$@"
      return 0
      ;;
  esac
  # All of it goes by standard input: arguments of a process can be read by others.
  answer=$({
    printf 'url = "%s%s"\nheader = "Content-Type: application/json"\n' "$TALLY_URL" "$3"
    printf 'header = "Idempotency-Key: sh-%s-%s"\n' "$2" "$4"
    [ -z "$token" ] || printf 'header = "Authorization: Bearer %s"\n' "$(tally_text "$token")"
    printf 'data-binary = "%s"\n' "$(tally_text "$5")"
  } | curl --silent --show-error --max-time "${TALLY_WAIT:-5}" --write-out '\n%{http_code}' --config -)
  case ${answer##*"
"} in
    2??) ;;
    400 | 409 | 413 | 422) echo "tally: job $2 $4 was refused: $answer" >&2 ;;
    *) tally_keep "$@" ;;
  esac
  return 0
}

tally_keep() {
  if [ -z "$TALLY_SPOOL" ]; then
    echo "tally: job $2 $4 is not on record, and TALLY_SPOOL names no folder to keep it in: $answer" >&2
    return 0
  fi
  step=1
  [ "$1" != end ] || step=2
  # In a shell of its own, so that neither umask nor a failure reaches the caller.
  (
    set -e
    umask 077
    mkdir -p "$TALLY_SPOOL"
    now=$(date +%s%3N)
    name=run-$now-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
    file=$TALLY_SPOOL/.$name.new
    {
      printf '{"format":"tallystick.spool.v1","name":"%s","made_ms":%s,"tenant_id":"%s",' \
        "$name" "$now" "$(tally_text "$TALLY_TENANT")"
      printf '"job_id":"%s","part":"%s","session":null,"requests":[{"path":"%s",' "$2" "$1" "$3"
      printf '"key":"sh-%s-%s","body":"%s"}]}' "$2" "$4" "$(tally_text "$5")"
    } >"$file"
    sync "$file"
    mv "$file" "$TALLY_SPOOL/$name-$step.json"
    sync "$TALLY_SPOOL"
  ) || echo "tally: job $2 $4 is not on record, and could not be kept in $TALLY_SPOOL" >&2
}
