package dump

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cleave-cri/cleave/config"
)

// gone stands where a secret was. It needs no escape in JSON or YAML.
const gone = "REMOVED"

// leastSecret is the shortest text that is taken for a secret because a file says so: a shorter one would be found in words.
const leastSecret = 8

// named is how that is called whose value is a secret, perhaps with something before.
const named = `(?i:[a-z0-9_-]*(?:token|password|passwd|secret|client-key-data|(?:api|access|private)[_-]?key|[_-]auth|\bauth))`

// forms are secrets by their looks. The group stays. Nothing that goes has a quote that is not escaped, and behind a quoted name it
// stood in quotes, so that JSON stays JSON.
var forms = []*regexp.Regexp{
	regexp.MustCompile(`()eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*`), // a JSON web token, which service accounts have
	regexp.MustCompile(`((?i:\b(?:bearer|basic)) +)[A-Za-z0-9._~+/=-]{16,}`),
	regexp.MustCompile(`((?i:\bauthorization\\?["']?\s*[:=]\s*\\?["']?(?:bearer|basic)) +)[A-Za-z0-9._~+/=-]+`),
	regexp.MustCompile(`("` + named + `"\s*[:=]\s*")(?:[^"\\]|\\.)+`),
	regexp.MustCompile(`(["']` + named + `\\?["']\s*[:=]\s*\\?["'])[^"'\\]+`),
	regexp.MustCompile(`(\b` + named + `\s*[:=]\s*(?:\\?["'])?)[^\s"'\\,;&<>{}\[\]]+`),
	// Up to the last @ of what may have a password: behind the host there is a slash.
	regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s/"'\\]+@`),
	// Addresses that are signed, as registries redirect to; JSON may write & as \u0026.
	regexp.MustCompile(`((?:[?&]|\\u0026)(?i:(?:x-(?:amz|goog)-)?(?:signature|credential)|sig)=)[^\s"'\\&]+`),
	regexp.MustCompile(`()-----BEGIN [A-Z ]*PRIVATE KEY-----[^-"]*(?:-----END [A-Z ]*PRIVATE KEY-----)?`),
}

// secrets are those that this node's files have, besides what forms find.
type secrets [][]byte

// cleaner knows the secrets of the files that a configuration names. One that can't be read has told cleave nothing either.
func cleaner(c config.Config) (s secrets) {
	if text, err := os.ReadFile(c.CRIO.KubeletTokenFile); err == nil {
		s = s.and(string(text))
	}
	if text, err := os.ReadFile(c.Reclaim.Kubeconfig); err == nil {
		var n yaml.Node
		if yaml.Unmarshal(text, &n) == nil {
			s = s.below(&n)
		}
	}
	return s
}

func (s secrets) and(text string) secrets {
	if text = strings.TrimSpace(text); len(text) >= leastSecret {
		s = append(s, []byte(text))
		// In JSON some letters are written otherwise.
		if escaped, err := json.Marshal(text); err == nil && string(escaped) != `"`+text+`"` {
			s = append(s, escaped[1:len(escaped)-1])
		}
	}
	return s
}

// below finds the secrets of a kubeconfig.
func (s secrets) below(n *yaml.Node) secrets {
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 {
			switch n.Content[i-1].Value {
			case "token", "password", "client-key-data", "id-token", "refresh-token", "access-token":
				s = s.and(child.Value)
			case "tokenFile":
				if text, err := os.ReadFile(child.Value); err == nil {
					s = s.and(string(text))
				}
			}
		}
		s = s.below(child)
	}
	return s
}

// remove takes secrets out of text, and counts them.
func (s secrets) remove(text []byte) (_ []byte, removed int) {
	for _, secret := range s {
		removed += bytes.Count(text, secret)
		text = bytes.ReplaceAll(text, secret, []byte(gone))
	}
	for _, form := range forms {
		text = form.ReplaceAllFunc(text, func(found []byte) []byte {
			keep := form.FindSubmatch(found)[1]
			if bytes.HasSuffix(found, []byte(gone)) && len(found) == len(keep)+len(gone) {
				return found
			}
			removed++
			out := append(bytes.Clone(keep), gone...)
			if bytes.HasSuffix(found, []byte("@")) && bytes.HasSuffix(keep, []byte("://")) {
				out = append(out, '@')
			}
			return out
		})
	}
	return text, removed
}
