// Opens a checkpoint as golang.org/x/mod does that knows Ed25519 alone, and again with an ML-DSA-44 key, by filippo.io/mldsa.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"

	"filippo.io/mldsa"
	"golang.org/x/mod/sumdb/note"
)

// cosigner verifies lines of type 0x06 (c2sp.org/tlog-cosignature).
type cosigner struct {
	name string
	hash uint32
	key  *mldsa.PublicKey
}

func (c *cosigner) Name() string    { return c.name }
func (c *cosigner) KeyHash() uint32 { return c.hash }

func (c *cosigner) Verify(text, signature []byte) bool {
	lines := strings.Split(string(text), "\n")
	if len(signature) != 8+2420 || len(lines) != 4 {
		return false
	}
	size, err := strconv.ParseUint(lines[1], 10, 63)
	if err != nil {
		return false
	}
	root, err := base64.StdEncoding.DecodeString(lines[2])
	if err != nil || len(root) != 32 {
		return false
	}
	var message bytes.Buffer
	message.WriteString("subtree/v1\n\x00")
	message.WriteByte(byte(len(c.name)))
	message.WriteString(c.name)
	message.Write(signature[:8])
	message.WriteByte(byte(len(lines[0])))
	message.WriteString(lines[0])
	binary.Write(&message, binary.BigEndian, [2]uint64{0, size})
	message.Write(root)
	return mldsa.Verify(c.key, message.Bytes(), signature[8:], nil) == nil
}

func newCosigner(text string) *cosigner {
	parts := strings.SplitN(text, "+", 3)
	typed, err := base64.StdEncoding.DecodeString(parts[2])
	must(err)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA44(), typed[1:])
	must(err)
	hash := sha256.Sum256(append([]byte(parts[0]+"\n"), typed...))
	found := &cosigner{parts[0], binary.BigEndian.Uint32(hash[:4]), key}
	if typed[0] != 6 || fmt.Sprintf("%08x", found.hash) != parts[1] {
		panic("the verifier key")
	}
	return found
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	text, err := os.ReadFile(os.Args[1])
	must(err)
	first, err := note.NewVerifier(os.Args[2])
	must(err)
	for _, known := range []note.Verifiers{note.VerifierList(first), note.VerifierList(first, newCosigner(os.Args[3]))} {
		opened, err := note.Open(text, known)
		must(err)
		fmt.Println(len(opened.Sigs), len(opened.UnverifiedSigs))
	}
}
