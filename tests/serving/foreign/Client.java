import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;

/** Posts a body in each way that java.net.http has, and prints a status and an answer a line. */
public class Client {
    public static void main(String[] arguments) throws Exception {
        URI address = URI.create(arguments[0]);
        String body = arguments[1];
        byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
        HttpClient usual = HttpClient.newHttpClient(); // offers h2c with every request
        HttpClient plain = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        for (HttpClient client : new HttpClient[] {usual, usual, plain}) {
            HttpRequest.Builder request =
                HttpRequest.newBuilder(address).header("content-type", "application/json");
            print(client.send(request.POST(BodyPublishers.ofString(body)).build(), BodyHandlers.ofString()));
            // A stream has no length: it is sent in chunks.
            HttpRequest chunked =
                request.POST(BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(bytes))).build();
            print(client.send(chunked, BodyHandlers.ofString()));
            HttpRequest patient =
                request.POST(BodyPublishers.ofString(body)).expectContinue(true).build();
            print(client.send(patient, BodyHandlers.ofString()));
        }
    }

    static void print(HttpResponse<String> response) {
        System.out.println(response.statusCode() + " " + response.body());
    }
}
