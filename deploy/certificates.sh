#!/bin/sh
# certificates.sh FOLDER NAME... - a certificate and key for each name, by an authority made now, whose key is not kept.
#
# Names are node ids, and hosts of safekeepers; DNS names among the alternative ones hold them. Does nothing where all
# are there. For a trial: in earnest every machine has its own, made where the authority's key is.
set -eu
folder=$1
shift
umask 077
mkdir -p "$folder"
cd "$folder"
for name in "$@"; do
  [ -f "$name.pem" ] || missing=yes
done
[ "${missing:-no}" = yes ] || exit 0
authority=$(mktemp)
trap 'rm -f "$authority" request.pem' EXIT
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 825 -subj "/CN=tallystick safekeepers" \
  -addext keyUsage=critical,keyCertSign -addext basicConstraints=critical,CA:TRUE \
  -keyout "$authority" -out ca.pem 2>/dev/null
for name in "$@"; do
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$name" -addext "subjectAltName=DNS:$name" \
    -keyout "$name.key" -out request.pem 2>/dev/null
  openssl x509 -req -in request.pem -CA ca.pem -CAkey "$authority" -days 825 -copy_extensions copy -out "$name.pem" 2>/dev/null
done
