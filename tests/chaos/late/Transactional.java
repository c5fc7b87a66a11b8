// A transactional producer of Apache Kafka's client, told what to do line by line; answers "ok" or what went wrong.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.StringSerializer;

public class Transactional {
    interface Call {
        void run();
    }

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("transactional.id", args[2]);
        settings.put("transaction.timeout.ms", args[3]);
        settings.put("request.timeout.ms", args[4]);
        settings.put("delivery.timeout.ms", "60000");
        settings.put("linger.ms", "0");
        KafkaProducer<String, String> producer =
                new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        producer.initTransactions();
        System.out.println("ok");
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            try {
                obey(producer, args[1], line.split(" "));
                System.out.println("ok");
            } catch (Exception error) {
                System.out.println(error.toString().replace('\n', ' '));
            }
        }
    }

    static void obey(KafkaProducer<String, String> producer, String topic, String[] words) throws Exception {
        switch (words[0]) {
            case "begin" -> producer.beginTransaction();
            case "send" -> producer.send(record(topic, words)).get();
            case "later" -> producer.send(record(topic, words));
            case "commit" -> insist(producer::commitTransaction);
            case "abort" -> insist(producer::abortTransaction);
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    static ProducerRecord<String, String> record(String topic, String[] words) {
        return new ProducerRecord<>(topic, Integer.valueOf(words[1]), null, words[2]);
    }

    static void insist(Call call) {
        for (int turn = 0; ; turn++) {
            try {
                call.run();
                return;
            } catch (TimeoutException error) {
                if (turn == 10) {
                    throw error;
                }
            }
        }
    }
}
