// Posts a body in each way that net/http has, and prints a status and an answer a line.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	address, body := os.Args[1], os.Args[2]
	for _, edit := range []func(*http.Request){
		func(*http.Request) {},
		func(request *http.Request) { request.ContentLength = -1 }, // in chunks
		func(request *http.Request) { request.Header.Set("Expect", "100-continue") },
		func(request *http.Request) { request.Header.Set("Content-Encoding", "identity") },
		func(request *http.Request) { request.Close = true },
	} {
		request, err := http.NewRequest("POST", address, strings.NewReader(body))
		check(err)
		request.Header.Set("Content-Type", "application/json")
		edit(request)
		response, err := http.DefaultClient.Do(request)
		check(err)
		answer, err := io.ReadAll(response.Body)
		check(err)
		response.Body.Close()
		fmt.Println(response.StatusCode, string(answer))
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
