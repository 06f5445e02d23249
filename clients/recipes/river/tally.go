// Package tally puts jobs of River on record: river.Config{Plugins: []rivertype.Plugin{&tally.Recorder{}}}.
// A job is river.{id}: created when inserted, accepted when first worked, completed, or failed with the error of its
// last attempt, or as cancelled. Attempts are one job. What cannot be sent within a second is logged, and lost.
package tally

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

type Recorder struct{ river.MiddlewareDefaults }
type event = map[string]any

func (*Recorder) InsertMany(ctx context.Context, _ []*rivertype.JobInsertParams, insert func(context.Context) ([]*rivertype.JobInsertResult, error)) ([]*rivertype.JobInsertResult, error) {
	inserted, err := insert(ctx)
	for _, each := range inserted {
		send(each.Job, "JobCreated", event{"spec": event{"kind": each.Job.Kind}})
	}
	return inserted, err
}

func (*Recorder) Work(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) (err error) {
	send(job, "JobCreated", event{"spec": event{"kind": job.Kind}}) // repeated, it adds nothing
	send(job, "JobAccepted", event{"dc_id": "river", "worker_count": 1})
	err = errors.New("it panicked") // unless work returns
	defer func() {
		if err == nil {
			send(job, "JobCompleted", event{"final_status": "completed"})
		} else if !errors.Is(err, &river.JobSnoozeError{}) && (job.Attempt >= job.MaxAttempts || errors.Is(errors.Join(err, context.Cause(ctx)), &river.JobCancelError{})) {
			send(job, "JobFailed", event{"error": err.Error(), "failed_dc": "river"})
		}
	}()
	return work(ctx)
}

func send(job *rivertype.JobRow, kind string, fields event) {
	fields["tenant_id"], fields["type"], fields["job_id"] = os.Getenv("TALLY_TENANT"), kind, fmt.Sprintf("river.%d", job.ID)
	line, _ := json.Marshal(fields)
	request, err := http.NewRequest("POST", os.Getenv("TALLY_URL")+"/v1/events", bytes.NewReader(line))
	if err == nil {
		request.Header = http.Header{"Content-Type": {"application/x-ndjson"}, "Authorization": {"Bearer " + os.Getenv("TALLY_TOKEN")}, "Idempotency-Key": {fmt.Sprintf("river.%d-%s", job.ID, kind)}}
		answer := &http.Response{}
		if answer, err = (&http.Client{Timeout: time.Second}).Do(request); err == nil && answer.Body.Close() == nil && answer.StatusCode >= 300 {
			err = errors.New(answer.Status)
		}
	}
	if err != nil {
		log.Printf("%s of river.%d is not on record: %v", kind, job.ID, err)
	}
}
