// Package control is how cleave's own commands speak with its running processes:
// HTTP and JSON on unix sockets that only root may use. It knows no command and
// no answer; agent and agent/snapshotter give it theirs.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"
)

const (
	// Timeout bounds how long a client may take to send its request and to take
	// the answer, and how long it waits for one.
	Timeout = 10 * time.Second
	// WorkTimeout is that for requests by POST, which do something and answer when
	// it is done: a clean-up of many thousand folders.
	WorkTimeout = 10 * time.Minute
	// maxAnswerBytes is the largest answer that is read.
	maxAnswerBytes = 16 << 20
	// maxSentBytes is the most that is read of what is sent along with a request.
	maxSentBytes = 64 << 10
	// errorBytes is how much of an answer that is none goes into a message.
	errorBytes = 500
)

// ErrNotRunning says that nobody answers on a socket.
var ErrNotRunning = errors.New("it is not running")

// Func answers a request. It gets what was sent along, as long as that is read;
// none needs to read it.
type Func func(ctx context.Context, sent io.Reader) (any, error)

// Without is the Func for requests that have nothing to send along.
func Without(do func(context.Context) (any, error)) Func {
	return func(ctx context.Context, _ io.Reader) (any, error) { return do(ctx) }
}

// With is the Func for requests that send a value along, in JSON and with no field
// that the value lacks.
func With[T any](do func(context.Context, T) (any, error)) Func {
	return func(ctx context.Context, sent io.Reader) (any, error) {
		var value T
		d := json.NewDecoder(io.LimitReader(sent, maxSentBytes))
		d.DisallowUnknownFields()
		if err := d.Decode(&value); err != nil {
			return nil, fmt.Errorf("read what is sent along, which has to be %T in JSON: %w", value, err)
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return nil, errors.New("read what is sent along: there is something behind its end")
		}
		return do(ctx, value)
	}
}

// Server answers requests by pattern, as of [http.ServeMux]: with what a function
// of routes returns, as JSON. Nil is no content; an error is told with status 409.
// What is asked by POST has [WorkTimeout].
func Server(routes map[string]Func) *http.Server {
	mux := http.NewServeMux()
	for pattern, do := range routes {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				// The server's own limits would end the work as well as the answer.
				until, conn := time.Now().Add(WorkTimeout), http.NewResponseController(w)
				if err := errors.Join(conn.SetReadDeadline(until), conn.SetWriteDeadline(until)); err != nil {
					http.Error(w, err.Error(), http.StatusInternalServerError)
					return
				}
			}
			answer(w, r, do)
		})
	}
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: Timeout,
		ReadTimeout:       Timeout,
		WriteTimeout:      Timeout,
		IdleTimeout:       Timeout,
		MaxHeaderBytes:    16 << 10,
	}
}

func answer(w http.ResponseWriter, r *http.Request, do Func) {
	value, err := do(r.Context(), r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	if value == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	body, err := json.Marshal(value)
	if err != nil {
		http.Error(w, "encode the answer: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) //nolint:errcheck // the client is gone
}

// Serve answers on a listener until the server is closed. The error says why it
// could not go on.
func Serve(server *http.Server, l net.Listener) error {
	err := server.Serve(l)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fmt.Errorf("serve the socket %s: %w", l.Addr(), err)
}

// Ask makes a request on a socket and reads the answer into a value, unless that
// is nil; to an [io.Writer] it is written as it is. It returns [ErrNotRunning] if nobody answers there.
func Ask(ctx context.Context, socket, method, path string, into any) error {
	return Send(ctx, socket, method, path, nil, into)
}

// Send is Ask with a value that is sent along in JSON, unless it is nil.
func Send(ctx context.Context, socket, method, path string, value, into any) error {
	limit := Timeout
	if method == http.MethodPost {
		// Work may take long; that nobody is at work is known soon.
		if err := limited(ctx, Timeout, socket, http.MethodGet, "/", nil, nil); err != nil && !errors.Is(err, errStatus) {
			return err
		}
		limit = WorkTimeout
	}
	return limited(ctx, limit, socket, method, path, value, into)
}

// errStatus says that an answer is none of what was asked for.
var errStatus = errors.New("it answers")

func limited(ctx context.Context, limit time.Duration, socket, method, path string, value, into any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var sent io.Reader
	if value != nil {
		body, err := json.Marshal(value)
		if err != nil {
			return fmt.Errorf("encode the request: %w", err)
		}
		sent = bytes.NewReader(body)
	}
	err := ask(ctx, socket, method, path, sent, into)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return ErrNotRunning
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("it is there and does not answer within %s; look at its log: %w", limit, context.DeadlineExceeded)
	}
	return err
}

func ask(ctx context.Context, socket, method, path string, sent io.Reader, into any) (err error) {
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, method, "http://cleave"+path, sent)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	if response.StatusCode >= http.StatusMultipleChoices {
		// What it says is for the message; that it can't be read changes nothing.
		body, _ := io.ReadAll(io.LimitReader(response.Body, errorBytes)) //nolint:errcheck // see above
		text := strings.TrimSpace(string(body))
		if response.StatusCode == http.StatusConflict && text != "" {
			return errors.New(text) // its own words, which say enough
		}
		return fmt.Errorf("%w %s: %s", errStatus, response.Status, text)
	}
	if into == nil {
		return nil
	}
	if text, ok := into.(io.Writer); ok {
		_, err := io.Copy(text, io.LimitReader(response.Body, maxAnswerBytes))
		return err
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxAnswerBytes)).Decode(into); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}
