//! What users of other systems reported, each as a test with the right value.
//!
//! Where a test compares with a run of the same model on one rank, that run has no collectives, no
//! shards and no padding: whatever the report is about cannot happen there. Reports that are about
//! layouts alone are in `ir/tests/placement/reports.rs`.

#[path = "reports/attention.rs"]
mod attention;
#[path = "reports/checkpoint.rs"]
mod checkpoint;
#[path = "reports/custom_ops.rs"]
mod custom_ops;
#[path = "reports/data_parallel.rs"]
mod data_parallel;
#[path = "reports/deadlock.rs"]
mod deadlock;
#[path = "reports/differential.rs"]
mod differential;
#[path = "reports/embedding.rs"]
mod embedding;
#[path = "reports/fused.rs"]
mod fused;
#[path = "reports/harness.rs"]
mod harness;
#[path = "reports/layers.rs"]
mod layers;
#[path = "reports/layouts.rs"]
mod layouts;
#[path = "reports/loss.rs"]
mod loss;
#[path = "reports/nonfinite.rs"]
mod nonfinite;
#[path = "reports/parallel.rs"]
mod parallel;
#[path = "reports/quantization.rs"]
mod quantization;
#[path = "reports/random.rs"]
mod random;
#[path = "reports/redistribution.rs"]
mod redistribution;
#[path = "reports/tensor_parallel.rs"]
mod tensor_parallel;
#[path = "reports/tied.rs"]
mod tied;
#[path = "reports/uneven.rs"]
mod uneven;
