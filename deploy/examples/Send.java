import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.time.Instant;
import java.util.Set;
import java.util.concurrent.ThreadLocalRandom;

/**
 * Writes one event with java.net.http, and repeats the request itself.
 *
 * <pre>FENCEPOST_URL=http://127.0.0.1:8000 java deploy/examples/Send.java order-1 [TOPIC]</pre>
 */
class Send {
    static final Duration GIVE_UP = Duration.ofSeconds(60);
    static final long FIRST_PAUSE_MS = 200;
    static final long PAUSE_MAX_MS = 5_000;
    /** The event is not written, or may be: the next request with the same key tells. All other answers are final. */
    static final Set<Integer> RETRIED = Set.of(408, 409, 429, 500, 502, 503, 504);

    public static void main(String[] args) throws InterruptedException {
        String key = args[0];
        String topic = args.length > 1 ? args[1] : "demo";
        String event = """
            {"topic": "%s", "key": "%s", "value": {"order": "%s", "total": 12.5}}""".formatted(topic, key, key);
        HttpRequest request = HttpRequest.newBuilder(URI.create(System.getenv("FENCEPOST_URL") + "/events"))
            .version(HttpClient.Version.HTTP_1_1)
            .timeout(Duration.ofSeconds(15))
            .header("Content-Type", "application/json")
            .header("Idempotency-Key", key)
            .POST(BodyPublishers.ofString(event))
            .build();
        HttpResponse<String> answer = send(HttpClient.newHttpClient(), request);
        System.out.println(answer.statusCode() + " " + answer.body());
        System.exit(answer.statusCode() == 201 ? 0 : 1);
    }

    /** Sends a request until the answer is final. Throws after GIVE_UP: then the event may be written. */
    static HttpResponse<String> send(HttpClient client, HttpRequest request) throws InterruptedException {
        Instant giveUpAt = Instant.now().plus(GIVE_UP);
        for (long pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, PAUSE_MAX_MS)) {
            long waitMs = ThreadLocalRandom.current().nextLong(pauseMs / 2, pauseMs + 1);
            try {
                HttpResponse<String> answer = client.send(request, BodyHandlers.ofString());
                if (!RETRIED.contains(answer.statusCode())) {
                    return answer;
                }
                System.err.println(answer.statusCode() + " " + answer.body());
                waitMs += 1_000 * answer.headers().firstValueAsLong("Retry-After").orElse(0);
            } catch (IOException error) {
                System.err.println("no answer: " + error);
            }
            if (Instant.now().plusMillis(waitMs).isAfter(giveUpAt)) {
                throw new IllegalStateException("no final answer in " + GIVE_UP);
            }
            Thread.sleep(waitMs);
        }
    }
}
