// Writes one event with net/http, and repeats the request itself.
//
//	FENCEPOST_URL=http://127.0.0.1:8000 go run deploy/examples/send.go order-1 [TOPIC]
//
// Because of the header Idempotency-Key, http.Transport repeats a POST by itself too, if a connection that it has kept
// open turns out to be closed.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"
)

const (
	giveUp     = 60 * time.Second
	firstPause = 200 * time.Millisecond
	pauseMax   = 5 * time.Second
)

// The event is not written, or may be: the next request with the same key tells. All other answers are final.
var retried = []int{408, 409, 429, 500, 502, 503, 504}

// attempt sends an event once. Its error says that there was no answer: the event may be written.
func attempt(client *http.Client, key string, event []byte) (status int, answer []byte, retryAfter time.Duration, err error) {
	request, err := http.NewRequest("POST", os.Getenv("FENCEPOST_URL")+"/events", bytes.NewReader(event))
	if err != nil {
		return 0, nil, 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, 0, err
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
	return response.StatusCode, answer, time.Duration(seconds) * time.Second, err
}

// send sends an event until the answer is final. After giveUp it fails: then the event may be written.
func send(client *http.Client, key string, event []byte) (int, []byte, error) {
	giveUpAt := time.Now().Add(giveUp)
	for pause := firstPause; ; pause = min(2*pause, pauseMax) {
		status, answer, wait, err := attempt(client, key, event)
		if err == nil && !slices.Contains(retried, status) {
			return status, answer, nil
		}
		fmt.Fprintln(os.Stderr, status, string(answer), err)
		wait += pause/2 + rand.N(pause/2)
		if time.Now().Add(wait).After(giveUpAt) {
			return 0, nil, fmt.Errorf("%s: no final answer in %v", key, giveUp)
		}
		time.Sleep(wait)
	}
}

func main() {
	key, topic := os.Args[1], "demo"
	if len(os.Args) > 2 {
		topic = os.Args[2]
	}
	value := map[string]any{"order": key, "total": 12.5}
	event, err := json.Marshal(map[string]any{"topic": topic, "key": key, "value": value})
	if err != nil {
		panic(err)
	}
	status, answer, err := send(&http.Client{Timeout: 15 * time.Second}, key, event)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(status, string(answer))
	if status != http.StatusCreated {
		os.Exit(1)
	}
}
