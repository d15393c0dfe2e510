// Asks INFaaS over HTTP: go run . [APP]. INFAAS_GATEWAY: the gateway's URL, as `infaas up` prints it. It needs nothing but Go.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"time"
)

type Tensor struct {
	Name     string `json:"name"`
	Shape    []int  `json:"shape"`
	Datatype string `json:"datatype"`
	Data     any    `json:"data,omitempty"`
}

type Needs struct {
	LatencyMs float64 `json:"latency_ms,omitempty"`
	Accuracy  float64 `json:"accuracy,omitempty"`
	Cost      float64 `json:"cost,omitempty"`
}

type Answer struct {
	Parameters map[string]any `json:"parameters"`
	Outputs    []Tensor       `json:"outputs"`
}

// Refused is an error of the gateway: its code, a sentence, and when a later try may succeed.
type Refused struct {
	Status       int
	Code         string  `json:"code"`
	Message      string  `json:"error"`
	RetryAfterMs float64 `json:"retry_after_ms"`
}

func (refused *Refused) Error() string { return fmt.Sprintf("HTTP %d: %s", refused.Status, refused.Message) }

type Client struct {
	URL   string // of the gateway
	Token string // where the gateway needs one
	HTTP  http.Client
}

// Query asks an app. It returns a *Refused where the system refuses.
func (client *Client) Query(app string, inputs []Tensor, needs Needs) (*Answer, error) {
	body, err := json.Marshal(map[string]any{"inputs": inputs, "parameters": needs})
	if err != nil {
		return nil, err
	}
	answer := new(Answer)
	err = client.do("POST", "/v2/models/"+app+"/infer", body, answer)
	return answer, err
}

// Inputs gives the inputs of an app. The first axis counts items; -1 is any length.
func (client *Client) Inputs(app string) ([]Tensor, error) {
	var found struct{ Inputs []Tensor }
	err := client.do("GET", "/v2/models/"+app, nil, &found)
	return found.Inputs, err
}

func (client *Client) do(method, path string, body []byte, found any) error {
	request, err := http.NewRequest(method, client.URL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	if client.Token != "" {
		request.Header.Set("Authorization", "Bearer "+client.Token)
	}
	reply, err := client.HTTP.Do(request)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		refused := &Refused{Status: reply.StatusCode}
		if err := json.NewDecoder(reply.Body).Decode(refused); err != nil {
			return err
		}
		return refused
	}
	return json.NewDecoder(reply.Body).Decode(found)
}

// zeros fills one item with zeros, or with a text.
func zeros(input Tensor) Tensor {
	count := 1
	for axis, size := range input.Shape {
		if size < 0 && axis == 0 {
			input.Shape[axis] = 1
		} else if size < 0 {
			input.Shape[axis] = 8
		}
		count *= input.Shape[axis]
	}
	data := make([]any, count)
	for i := range data {
		switch input.Datatype {
		case "BYTES":
			data[i] = "some text"
		case "BOOL":
			data[i] = false
		default:
			data[i] = 0
		}
	}
	input.Data = data
	return input
}

func main() {
	app, url := "digits", "http://localhost:8000"
	if len(os.Args) > 1 {
		app = os.Args[1]
	}
	if given := os.Getenv("INFAAS_GATEWAY"); given != "" {
		url = given
	}
	client := &Client{URL: url, Token: os.Getenv("TOKEN"), HTTP: http.Client{Timeout: 30 * time.Second}}
	inputs, err := client.Inputs(app)
	if err == nil {
		for i := range inputs {
			inputs[i] = zeros(inputs[i])
		}
		var answer *Answer
		if answer, err = client.Query(app, inputs, Needs{LatencyMs: 10_000}); err == nil {
			fmt.Println(answer.Parameters["variant"], "answered in", answer.Parameters["latency_ms"], "ms")
			for _, output := range answer.Outputs {
				fmt.Println(output.Name, output.Shape, output.Data)
			}
			return
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
