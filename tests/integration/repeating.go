// Sends events one after the other over kept-alive connections, and prints what became of each. net/http repeats a POST
// by itself if it has an Idempotency-Key, and its connection ends before a byte of the answer: it calls GotConn again.
//
//	go run repeating.go URL TOPIC COUNT
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"os"
	"strconv"
	"strings"
)

type outcome struct {
	Status   int  `json:"status"`
	Attempts int  `json:"attempts"`
	Replayed bool `json:"replayed"`
}

func send(url, topic string, number int) (outcome, error) {
	var sent outcome
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { sent.Attempts++ }}
	event := fmt.Sprintf(`{"topic":%q,"value":%d}`, topic, number)
	context := httptrace.WithClientTrace(context.Background(), trace)
	request, err := http.NewRequestWithContext(context, http.MethodPost, url, strings.NewReader(event))
	if err != nil {
		return sent, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", fmt.Sprintf("go-%d", number))
	request.Header.Set("Prefer", "wait=4") // the attempt that was cut off may still be in progress
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return sent, err
	}
	defer response.Body.Close()
	sent.Status, sent.Replayed = response.StatusCode, response.Header.Get("Idempotent-Replayed") == "true"
	_, err = io.Copy(io.Discard, response.Body) // read to its end, so that the connection is used again
	return sent, err
}

func main() {
	count, err := strconv.Atoi(os.Args[3])
	for number := 0; err == nil && number < count; number++ {
		var sent outcome
		if sent, err = send(os.Args[1], os.Args[2], number); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(sent)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
