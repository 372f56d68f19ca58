package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/cleave-cri/cleave/engine"
)

// MaxBytes is the longest record, its line break included. One of a pass over
// 500 pods and 1 000 images has about 1 MiB.
const MaxBytes = 16 << 20

var (
	// ErrTooLarge says that a record is longer than MaxBytes.
	ErrTooLarge = fmt.Errorf("longer than %d MiB", MaxBytes>>20)
	// ErrTruncated says that a file ends within a record, as one does whose
	// writer was stopped, or is at work. All records before are good.
	ErrTruncated = errors.New("the file ends within a record")
	// ErrFormat says that a record has a format that this cleave does not read.
	ErrFormat = errors.New("unknown format")
)

// texts are keys of what is called something by others.
var texts = []string{"UID", "Namespace", "Name", "Owner", "ID", "Path", "Digest", "Handler", "Subject", "Error"}

// endless is an amount in a line, in quotes or as JSON allows without, about which
// the library of quantities would think for minutes; nil if there is none. No
// record of ours has such an amount, but a pod may be called 9e99999, and digits
// of an image's id may look like it.
func endless(line []byte) []byte {
	var key, value []byte // the key before, and a value
	for i := 0; i < len(line); {
		switch c := line[i]; {
		case c == '"':
			end := i + 1
			for end < len(line) && line[end] != '"' {
				if line[end] == '\\' {
					end++
				}
				end++
			}
			value = line[i+1 : min(end, len(line))]
			i = end + 1
			if rest := bytes.TrimLeft(line[min(i, len(line)):], " \t\r\n"); len(rest) > 0 && rest[0] == ':' {
				key = value
				continue
			}
			if bytes.IndexByte(value, '\\') >= 0 {
				var text string
				if json.Unmarshal(line[i-len(value)-2:min(i, len(line))], &text) == nil {
					value = []byte(text)
				}
			}
			if slices.Contains(texts, string(key)) {
				continue
			}
		case bytes.IndexByte(numeral, c) >= 0:
			end := i
			for end < len(line) && bytes.IndexByte(numeral, line[end]) >= 0 {
				end++
			}
			value = line[i:end]
			i = end
		default:
			i++
			continue
		}
		value = bytes.TrimSpace(value)
		if len(value) > 0 && bytes.IndexByte(numeral, value[0]) >= 0 && engine.Endless(string(value)) {
			return []byte(strconv.Quote(string(value)))
		}
	}
	return nil
}

// numeral are the bytes that numbers of JSON have.
var numeral = []byte("+-.0123456789eE")

// Append appends r to b as one line. The format and the engine's version are
// this program's, whatever r says.
func Append(b []byte, r Record) ([]byte, error) {
	r.Format, r.Engine = Format, engine.Version
	line, err := json.Marshal(r)
	if err != nil {
		return b, fmt.Errorf("write record: %w", err)
	}
	if len(line) >= MaxBytes {
		return b, fmt.Errorf("write record of %d bytes: %w", len(line), ErrTooLarge)
	}
	return append(append(b, line...), '\n'), nil
}

// Reader reads records one by one.
type Reader struct {
	lines *bufio.Reader
	line  int
	err   error
}

// NewReader reads from r, which it may read ahead of what it returns.
func NewReader(r io.Reader) *Reader { return &Reader{lines: bufio.NewReaderSize(r, 1<<16)} }

// Line is the number of the line that Next read last, from 1.
func (r *Reader) Line() int { return r.line }

// Next returns the next record, or io.EOF behind the last one, or ErrTruncated
// if the file ends without a line break. Any error is final; it names the line.
func (r *Reader) Next() (Record, error) {
	if r.err != nil {
		return Record{}, r.err
	}
	record, err := r.next()
	if err != nil {
		if r.err = err; !errors.Is(err, io.EOF) {
			r.err = fmt.Errorf("read record on line %d: %w", r.line, err)
		}
	}
	return record, r.err
}

func (r *Reader) next() (Record, error) {
	r.line++
	var line []byte
	for {
		part, err := r.lines.ReadSlice('\n')
		if len(line)+len(part) > MaxBytes {
			return Record{}, ErrTooLarge
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return decode(line)
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return Record{}, ErrTruncated
		default:
			return Record{}, err
		}
	}
}

// decode reads one line. Before all else it looks at the format, because
// anything else may mean something else in another one.
func decode(line []byte) (Record, error) {
	var head struct{ Format, Engine *int }
	if err := json.Unmarshal(line, &head); err != nil {
		return Record{}, fmt.Errorf("not a record: %w", err)
	}
	switch {
	case head.Format == nil || head.Engine == nil:
		return Record{}, fmt.Errorf("not a record: it has no Format and Engine: %w", ErrFormat)
	case *head.Format != Format:
		return Record{}, fmt.Errorf("%w %d, this cleave reads %d; use the cleave that wrote the file", ErrFormat, *head.Format, Format)
	}
	if amount := endless(line); amount != nil {
		return Record{}, fmt.Errorf("not a record: %s is no amount", amount)
	}
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	var out Record
	if err := decoder.Decode(&out); err != nil {
		if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok && *head.Engine > engine.Version {
			return Record{}, fmt.Errorf("engine %d wrote %s, which engine %d does not know; use the cleave that wrote the file", *head.Engine, field, engine.Version)
		}
		return Record{}, fmt.Errorf("not a record: %w", err)
	}
	return out, nil
}
