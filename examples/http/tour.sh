#!/usr/bin/env bash
# Write, read, watch and work with curl. Usage: HTTP=http://127.0.0.1:4000 ./tour.sh
set -eu
json='content-type: application/json'
topic=tour-$$

curl -sf -X POST "$HTTP/v0/topics/$topic" -H "$json" \
  -d '{"records": [{"data": {"id": 1}, "tag": "new"}, {"data": {"id": 2}}]}'
echo
curl -sf -X POST "$HTTP/v0/topics/$topic/diff" -H "$json" -d '{"from_seq": 0, "limit": 10}'
echo

# A watch is made with its topics, and then read as an event stream.
stream=$(curl -sf -X POST "$HTTP/v0/watch" -H "$json" \
  -d "{\"topics\": {\"$topic\": {\"from_seq\": 0}}}" | sed 's/.*"stream_url":"\([^"]*\)".*/\1/')
curl -sN --max-time 2 -H 'accept: text/event-stream' "$HTTP$stream" || [ $? -eq 28 ]

curl -sf -X PUT "$HTTP/v0/topics/$topic-jobs" -H "$json" -d '{"type": "queue"}'
echo
curl -sf -X POST "$HTTP/v0/topics/$topic-jobs" -H "$json" -d '{"records": [{"data": "mail"}]}'
echo
curl -sf -X POST "$HTTP/v0/topics/$topic-jobs/claim" -H "$json" -d '{"node": "w1", "max": 8}'
echo
curl -sf -X POST "$HTTP/v0/topics/$topic-jobs/ack" -H "$json" -d '{"node": "w1", "seqs": [1]}'
echo
