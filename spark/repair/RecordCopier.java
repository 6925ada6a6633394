package fencepost;

import java.nio.ByteBuffer;
import java.nio.LongBuffer;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.Collections;
import java.util.Iterator;
import java.util.Map;

import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;

/**
 * Writes committed records of topics into another topic as they are (key, value, headers, timestamp, partition, order),
 * each once, whatever ends the process meanwhile.
 *
 * The position is the target itself: the records to write are the same list in each attempt, so what an earlier attempt
 * has committed is the beginning of that list. Each record of the target is compared with the list, and only what lies
 * behind the end of the target is sent, in transactions (KIP-98) of one transactional id. `init` fences the producer of an
 * earlier attempt; the caller then waits until no transaction is open in the target.
 *
 * Compiled at run time by Janino, the compiler in Spark, which knows no type arguments: hence the casts.
 */
public class RecordCopier {

    /** An offset that is farther away than this is sought; a nearer one is reached by reading on. */
    private static final long NEAR = 2000L;
    private static final Duration POLL = Duration.ofMillis(250L);

    private final KafkaConsumer source;
    private final KafkaConsumer target;
    private final KafkaProducer producer;
    private final String into;
    private final int recordsMost;
    private final long bytesMost;
    private final long openMs;
    private final long quietMs;
    private final ArrayDeque read = new ArrayDeque();
    private final ArrayDeque present = new ArrayDeque();

    private TopicPartition written;
    private long writtenEnd;
    private boolean isOpen;
    private int records;
    private long bytes;
    private long openSince;
    private long compared;
    private long sent;

    /**
     * @param recordsMost the most records of a transaction
     * @param bytesMost the bytes from which on a transaction is committed
     * @param openMs how long a transaction may be open before it is committed, whatever its size
     * @param quietMs how long a consumer may get nothing before that is an error
     */
    public RecordCopier(
        Map consumer, Map producer, String into, int recordsMost, long bytesMost, long openMs, long quietMs) {
        this.source = new KafkaConsumer(consumer);
        this.target = new KafkaConsumer(consumer);
        this.producer = new KafkaProducer(producer);
        this.into = into;
        this.recordsMost = recordsMost;
        this.bytesMost = bytesMost;
        this.openMs = openMs;
        this.quietMs = quietMs;
    }

    /** Fence earlier producers of this transactional id, and end their open transaction. */
    public void init() {
        producer.initTransactions();
    }

    /** Begin with a partition of the target, whose list begins at the offset `first`, and which ends at `end` now. */
    public void begin(int partition, long first, long end) {
        written = new TopicPartition(into, partition);
        writtenEnd = end;
        present.clear();
        target.assign(Collections.singletonList(written));
        target.seek(written, first);
    }

    /**
     * Go on with the records of a topic, in the partition with the same number: those within `spans`, big-endian pairs of
     * a first offset and the offset behind the last, in ascending order.
     *
     * @return the number of these records
     */
    public long copy(String topic, byte[] spans) {
        TopicPartition from = new TopicPartition(topic, written.partition());
        LongBuffer bounds = ByteBuffer.wrap(spans).asLongBuffer();
        read.clear();
        source.assign(Collections.singletonList(from));
        if (bounds.hasRemaining()) {
            source.seek(from, bounds.get(0));
        }
        long found = 0L;
        while (bounds.hasRemaining()) {
            long first = bounds.get();
            found += copySpan(from, first, bounds.get());
        }
        return found;
    }

    private long copySpan(TopicPartition from, long first, long end) {
        long found = 0L;
        long quietSince = System.currentTimeMillis();
        while (true) {
            commitIfDue();
            ConsumerRecord record = (ConsumerRecord) read.peek();
            if (record == null) {
                long position = source.position(from);
                if (position >= end) {
                    return found;
                }
                if (position + NEAR < first) {
                    source.seek(from, first);
                }
                fill(source, from, read);
                if (!read.isEmpty() || source.position(from) > position) {
                    quietSince = System.currentTimeMillis();
                }
                check(from, quietSince);
            } else if (record.offset() >= end) {
                return found;
            } else {
                read.remove();
                if (record.offset() >= first) {
                    put(record);
                    found++;
                }
            }
        }
    }

    private void put(ConsumerRecord record) {
        ConsumerRecord old = nextPresent();
        if (old != null) {
            if (!isCopy(old, record)) {
                throw new IllegalStateException(name(old) + " is not a copy of " + name(record));
            }
            compared++;
            return;
        }
        if (!isOpen) {
            producer.beginTransaction();
            isOpen = true;
            openSince = System.nanoTime();
        }
        Integer partition = Integer.valueOf(record.partition());
        Long timestamp = Long.valueOf(record.timestamp());
        producer.send(
            new ProducerRecord(into, partition, timestamp, record.key(), record.value(), record.headers()));
        sent++;
        records++;
        bytes += Math.max(0, record.serializedKeySize()) + Math.max(0, record.serializedValueSize());
        commitIfDue();
    }

    /** Commit a transaction that is large, or has been open for long: the broker would abort it at its timeout. */
    private void commitIfDue() {
        boolean isOld = isOpen && (System.nanoTime() - openSince) / 1000000L >= openMs;
        if (isOld || records >= recordsMost || bytes >= bytesMost) {
            commit();
        }
    }

    /** End with a partition: its records are committed, and it must have no others. */
    public void end() {
        commit();
        ConsumerRecord other = nextPresent();
        if (other != null) {
            throw new IllegalStateException(name(other) + " was not written by this plan");
        }
    }

    private void commit() {
        if (isOpen) {
            producer.commitTransaction(); // flushes, and fails if a record was not written
            isOpen = false;
            records = 0;
            bytes = 0L;
        }
    }

    /** Take the next record that the target had when its partition was begun; null behind the last. */
    private ConsumerRecord nextPresent() {
        long quietSince = System.currentTimeMillis();
        while (present.isEmpty()) {
            long position = target.position(written);
            if (position >= writtenEnd) {
                return null;
            }
            fill(target, written, present);
            if (target.position(written) > position) {
                quietSince = System.currentTimeMillis();
            }
            check(written, quietSince);
        }
        ConsumerRecord next = (ConsumerRecord) present.peek();
        // Behind the end are the records that this attempt has written.
        return next.offset() < writtenEnd ? (ConsumerRecord) present.remove() : null;
    }

    private static void fill(KafkaConsumer consumer, TopicPartition from, ArrayDeque queue) {
        Iterator polled = consumer.poll(POLL).records(from).iterator();
        while (polled.hasNext()) {
            queue.add(polled.next());
        }
    }

    private void check(TopicPartition from, long quietSince) {
        if (System.currentTimeMillis() - quietSince > quietMs) {
            throw new IllegalStateException("no record of " + from + " within " + quietMs + " ms");
        }
    }

    private static boolean isCopy(ConsumerRecord one, ConsumerRecord other) {
        return one.timestamp() == other.timestamp()
            && Arrays.equals((byte[]) one.key(), (byte[]) other.key())
            && Arrays.equals((byte[]) one.value(), (byte[]) other.value())
            && one.headers().equals(other.headers());
    }

    private static String name(ConsumerRecord record) {
        return record.topic() + "[" + record.partition() + "]@" + record.offset();
    }

    /** Return how many records an earlier attempt had written. */
    public long compared() {
        return compared;
    }

    /** Return how many records this attempt has written. */
    public long sent() {
        return sent;
    }

    /** Close the connections; an open transaction is aborted, by this or by the broker. */
    public void close() {
        Duration timeout = Duration.ofSeconds(5L);
        source.close(timeout);
        target.close(timeout);
        producer.close(timeout);
    }
}
