// An idempotent producer of Apache Kafka's client, told what to do line by line: "send TOPIC PARTITION VALUE ..." answers
// "delivered VALUE OFFSET" or "failed VALUE why" for each value in the end, "leader TOPIC PARTITION" the leader it knows.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

public class Idempotent {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("request.timeout.ms", args[1]);
        settings.put("delivery.timeout.ms", args[1]);
        settings.put("linger.ms", "0");
        // It learns of the new leader by itself, while the old one does not answer.
        settings.put("metadata.max.age.ms", "200");
        KafkaProducer<String, String> producer =
                new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            int partition = Integer.parseInt(words[2]);
            if (words[0].equals("leader")) {
                System.out.println("leader " + leader(producer, words[1], partition));
            }
            for (int n = 3; n < words.length; n++) {
                send(producer, words[1], partition, words[n]);
            }
        }
    }

    static int leader(KafkaProducer<String, String> producer, String topic, int partition) {
        return producer.partitionsFor(topic).stream()
                .filter(info -> info.partition() == partition && info.leader() != null)
                .mapToInt(info -> info.leader().id()).findFirst().orElse(-1);
    }

    static void send(KafkaProducer<String, String> producer, String topic, int partition, String value) {
        producer.send(new ProducerRecord<>(topic, partition, null, value), (sent, error) -> System.out.println(
                error == null ? "delivered " + value + " " + sent.offset() : "failed " + value + " " + error));
    }
}
