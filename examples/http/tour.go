// Write, watch and work, with Go's standard library. Usage: HTTP=http://127.0.0.1:4000 go run tour.go
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
)

type object = map[string]any

var base = os.Getenv("HTTP")

func send(method, path string, body any) *http.Response {
	data, _ := json.Marshal(body)
	request, err := http.NewRequest(method, base+path, bytes.NewReader(data))
	if err != nil {
		log.Fatal(err)
	}
	request.Header.Set("content-type", "application/json")
	if key := os.Getenv("KEY"); key != "" {
		request.Header.Set("authorization", "Bearer "+key)
	}
	reply, err := http.DefaultClient.Do(request)
	if err != nil {
		log.Fatal(err)
	}
	return reply
}

func call(method, path string, body any) object {
	reply := send(method, path, body)
	defer reply.Body.Close()
	var answer object
	if err := json.NewDecoder(reply.Body).Decode(&answer); err != nil {
		log.Fatal(err)
	}
	if reply.StatusCode >= 300 {
		log.Fatalf("%d %v", reply.StatusCode, answer["error"])
	}
	return answer
}

func main() {
	topic := fmt.Sprintf("tour-go-%d", os.Getpid())
	records := []object{{"data": object{"id": 1}}, {"data": object{"id": 2}}}
	fmt.Println("wrote", call("POST", "/v0/topics/"+topic, object{"records": records})["seqs"])

	watch := call("POST", "/v0/watch", object{"topics": object{topic: object{"from_seq": 0}}})
	stream := send("GET", watch["stream_url"].(string), nil)
	lines, event := bufio.NewScanner(stream.Body), ""
	lines.Buffer(nil, 16<<20)
	for event != "caught-up" && lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		if name == "event" {
			event = value
		} else if name == "data" && event == "record" {
			var frame struct{ Records []struct{ Data object } }
			json.Unmarshal([]byte(value), &frame)
			for _, record := range frame.Records {
				fmt.Println("read", record.Data["id"])
			}
		}
	}
	stream.Body.Close()

	jobs := "/v0/topics/" + topic + "-jobs"
	call("PUT", jobs, object{"type": "queue"})
	call("POST", jobs, object{"records": []object{{"data": "mail"}}})
	seqs := []any{}
	claimed := call("POST", jobs+"/claim", object{"node": "w1", "max": 8, "wait_ms": 1000})["claimed"]
	for _, job := range claimed.([]any) {
		seqs = append(seqs, job.(object)["$seq"])
	}
	fmt.Println("acked", call("POST", jobs+"/ack", object{"node": "w1", "seqs": seqs})["acked"])
}
