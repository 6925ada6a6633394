// Makes an invoice of each order, once, as a member of a consumer group: franz-go and net/http.
//
//	FENCEPOST_URL=http://127.0.0.1:8000 FENCEPOST_KAFKA=127.0.0.1:9092 \
//	    go run -C deploy/examples/process_orders . orders invoices
//
// It does what process_orders.py does with the reader of fencepost; both may be members of one group. One thing it does
// not: look for copies of an event. A topic that Fencepost writes exactly once has none.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	vatPercent = 19
	giveUp     = 60 * time.Second
	firstPause = 100 * time.Millisecond
	pauseMax   = 5 * time.Second
)

var (
	group      = flag.String("group", "billing", "the consumer group")
	recordsMax = flag.Int("records-max", 500, "the most orders of one transaction")
	sessionMs  = flag.Int("session-ms", 10_000, "a killed member's partitions move after it")
)

// The batch is not written, or may be: the next request with the same key tells. All other answers are final.
var retried = []int{408, 409, 429, 500, 502, 503, 504}

// errDropped: the partition has another member, or another batch was written from the same offset.
var errDropped = errors.New("dropped")

type order struct {
	Order int64 `json:"order"`
	Cents int64 `json:"cents"`
}

type invoice struct {
	order
	VAT int64 `json:"vat"`
}

type event struct {
	Topic string  `json:"topic"`
	Key   string  `json:"key"`
	Value invoice `json:"value"`
}

type position struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

type offsets struct {
	Group      string     `json:"group"`
	Member     string     `json:"member"`
	Generation int32      `json:"generation"`
	Positions  []position `json:"positions"`
}

type batch struct {
	Atomic  bool    `json:"atomic"`
	Events  []event `json:"events"`
	Offsets offsets `json:"offsets"`
}

// invoiceOf makes the result of one order. It depends on the record alone.
func invoiceOf(record *kgo.Record, topic string) (event, error) {
	var each order
	if err := json.Unmarshal(record.Value, &each); err != nil {
		return event{}, fmt.Errorf("offset %d: %w", record.Offset, err)
	}
	return event{topic, strconv.FormatInt(each.Order, 10), invoice{each, each.Cents * vatPercent / 100}}, nil
}

// attempt sends a batch once. Its error says that there was no answer: the batch may be written.
func attempt(ctx context.Context, key string, body []byte) (status int, answer []byte, retryAfter time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	url := os.Getenv("FENCEPOST_URL") + "/events/batch"
	request, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(body))
	if err != nil {
		return 0, nil, 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, 0, err
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
	return response.StatusCode, answer, time.Duration(seconds) * time.Second, err
}

// send sends a batch until it is written, or refused for good: errDropped, or another error.
func send(ctx context.Context, key string, body []byte) error {
	giveUpAt := time.Now().Add(giveUp)
	for pause := firstPause; ; pause = min(2*pause, pauseMax) {
		status, answer, wait, err := attempt(ctx, key, body)
		var problem struct{ Code string }
		if err == nil {
			_ = json.Unmarshal(answer, &problem) // of another form: no code
		}
		switch {
		case err == nil && status == http.StatusCreated:
			return nil
		case problem.Code == "stale-member" || problem.Code == "fingerprint-mismatch":
			return errDropped
		case err == nil && !slices.Contains(retried, status):
			return fmt.Errorf("%s: %d %s", key, status, answer)
		}
		log.Print(status, string(answer), err)
		wait += pause/2 + rand.N(pause/2)
		if time.Now().Add(wait).After(giveUpAt) {
			return fmt.Errorf("%s: no final answer in %v", key, giveUp)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// processor is one membership in the group.
type processor struct {
	client *kgo.Client
	result string
	mutex  sync.Mutex
	firsts map[position]int64 // the committed offset by partition (a position with offset 0)
}

// place notes where the group is in the partitions that were assigned: 0 where it has committed nothing.
func (p *processor) place(_ context.Context, _ *kgo.Client, response *kmsg.OffsetFetchResponse) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, topic := range response.Topics {
		for _, each := range topic.Partitions {
			p.firsts[position{Topic: topic.Topic, Partition: each.Partition}] = max(0, each.Offset)
		}
	}
	return nil
}

// write sends the results of the records of one partition, with the offset behind them.
func (p *processor) write(ctx context.Context, fetched kgo.FetchTopicPartition) error {
	at := position{Topic: fetched.Topic, Partition: fetched.Partition}
	p.mutex.Lock()
	first, known := p.firsts[at]
	p.mutex.Unlock()
	if !known {
		return fmt.Errorf("%v: records came before the group's offset", at)
	}
	end := fetched.Records[len(fetched.Records)-1].Offset + 1
	member, generation := p.client.GroupMetadata()
	made := batch{true, nil, offsets{*group, member, generation, []position{{at.Topic, at.Partition, end}}}}
	for _, record := range fetched.Records {
		result, err := invoiceOf(record, p.result)
		if err != nil {
			return err
		}
		made.Events = append(made.Events, result)
	}
	body, err := json.Marshal(made)
	if err != nil {
		return err
	}
	// The batch from an offset has one key, whichever member sends it: the service writes one at most.
	key := fmt.Sprintf("%s/%s/%d/%d", *group, at.Topic, at.Partition, first)
	if err := send(ctx, key, body); err != nil {
		return err
	}
	p.mutex.Lock()
	p.firsts[at] = end
	p.mutex.Unlock()
	fmt.Printf("written %d of %s\n", len(fetched.Records), key)
	return nil
}

// process reads as a member of the group until a batch is dropped, or fails.
func process(ctx context.Context, source, result string) error {
	p := &processor{result: result, firsts: map[position]int64{}}
	session := time.Duration(*sessionMs) * time.Millisecond
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(os.Getenv("FENCEPOST_KAFKA"), ",")...),
		kgo.ConsumerGroup(*group),
		kgo.ConsumeTopics(source),
		kgo.Balancers(kgo.RangeBalancer()), // the reader of fencepost has it too: a group has one for all its members
		kgo.SessionTimeout(session),
		kgo.HeartbeatInterval(session/5),
		kgo.DisableAutoCommit(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// A group without offsets begins at the start; what Kafka no longer has is an error, and not skipped.
		kgo.ConsumeResetOffset(kgo.NoResetOffset().AtStart()),
		kgo.OnOffsetsFetched(p.place),
		kgo.BlockRebalanceOnPoll(), // the batch in flight is finished first
	)
	if err != nil {
		return err
	}
	p.client = client
	defer client.CloseAllowingRebalance()
	for {
		fetches := client.PollRecords(ctx, *recordsMax)
		if err := fetches.Err0(); err != nil {
			return err
		}
		var failed error
		fetches.EachPartition(func(fetched kgo.FetchTopicPartition) {
			if failed == nil && fetched.Err != nil {
				failed = fetched.Err
			}
			if failed == nil && len(fetched.Records) > 0 {
				failed = p.write(ctx, fetched)
			}
		})
		if failed != nil {
			return failed
		}
		client.AllowRebalance()
	}
}

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	for {
		err := process(ctx, flag.Arg(0), flag.Arg(1))
		switch {
		case ctx.Err() != nil:
			return
		case !errors.Is(err, errDropped):
			log.Fatal(err)
		}
		fmt.Println("dropped: reading on from the committed offsets")
	}
}
