//! `planc doctor`: what this machine has for running plans on GPUs, and how to get what is missing.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use runtime::RunError;
use runtime::backend::cuda::attention;
use runtime::backend::cuda::check::{CheckLine, Summary as CheckSummary, check_ops};
use runtime::backend::cuda::doctor::{self, Gpu, Link, Report};
use runtime::backend::cuda::driver::Device;
use runtime::backend::cuda::library;
use serde_json::json;

use crate::input::{self, File, ModelArgs};
use crate::report::{Failure, Format, Outcome, Ui, print, print_json};
use crate::table::{WIDTH, bytes, plural, wrapped};

/// Shows the driver, the GPUs, the libraries, the links, and what is missing.
///
/// Ends with exit code 1 if plans cannot run on a GPU of this machine.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also run every op on GPU 0 and compare it with its reference; `-v` lists all of them.
    #[arg(long)]
    check: bool,
    /// Let cuDNN plan the attentions of a plan, and keep that for its first run: for a GPU that need not be
    /// here, an H200 unless `--gpu` names another.
    #[arg(long, value_name = "MODEL.plan", conflicts_with = "check")]
    plan_attention: Option<PathBuf>,
    /// The GPU to plan for, as `--gpu-properties` printed it there.
    #[arg(long, value_name = "FILE.json", requires = "plan_attention")]
    gpu: Option<PathBuf>,
    /// Print what cuDNN must know of GPU 0 to plan for it elsewhere.
    #[arg(long, conflicts_with_all = ["check", "plan_attention"])]
    gpu_properties: bool,
}

/// Runs the command.
pub fn run(args: &Args, ui: &Ui) -> Outcome {
    if args.gpu_properties {
        let json = Device::open(0).and_then(attention::properties).map_err(runtime_failure)?;
        print(&format!("{json}\n"));
        return Ok(());
    }
    if let Some(path) = &args.plan_attention {
        return plan_attention(path, args.gpu.as_deref(), ui);
    }
    let report = doctor::report();
    match ui.format {
        Format::Text => print(&text(&report)),
        Format::Json => print_json(&as_json(&report))?,
    }
    if !report.is_ready() {
        return Err(Failure::new("PL0630", "plans cannot run on a GPU of this machine")
            .help("get what is missing above; `planc run --device cpu` needs none of it"));
    }
    if args.check { check(ui) } else { Ok(()) }
}

fn runtime_failure(it: RunError) -> Box<Failure> {
    Failure::new(it.code(), it.to_string())
}

/// Plans the attentions of a plan.
fn plan_attention(path: &Path, gpu: Option<&Path>, ui: &Ui) -> Outcome {
    let plan = input::plan(path, &ModelArgs::default(), ui)?;
    let properties = match gpu {
        Some(path) => File::read(path)?.text,
        None => attention::H200.to_string(),
    };
    let planned = attention::plan_ahead(&plan, &properties).map_err(runtime_failure)?;
    if ui.format == Format::Json {
        let rows = planned.iter().map(|(shape, it)| {
            let why = it.as_ref().err().map(ToString::to_string);
            json!({ "attention": shape.to_string(), "scratch_bytes": it.as_ref().ok(), "refused": why })
        });
        return print_json(&json!(rows.collect::<Vec<_>>()));
    }
    for (shape, it) in &planned {
        let what = match it {
            Ok(scratch) => format!("planned, {} of scratch", bytes(*scratch)),
            Err(why) => format!("a kernel of our own: {why}"),
        };
        print(&format!("{shape}: {what}\n"));
    }
    if planned.is_empty() {
        print("the plan has no attention that cuDNN does\n");
    }
    Ok(())
}

/// Runs every op on the first GPU.
fn check(ui: &Ui) -> Outcome {
    let mut report = |line: &CheckLine| {
        if line.outcome.is_err() || ui.verbose {
            print(&check_text(line, ui.format));
        }
    };
    let device = Device::open(0).and_then(|it| check_ops(it, &mut report));
    let summary = device.map_err(runtime_failure)?;
    let CheckSummary { n_checked, n_failed } = summary;
    if ui.format == Format::Json {
        print(&format!("{}\n", json!({ "checked": n_checked, "failed": n_failed })));
    } else {
        print(&format!("{:COLUMN$}{n_checked} cases of ops, {n_failed} failed\n", "check"));
    }
    match n_failed {
        0 => Ok(()),
        n => Err(Failure::new(
            "PL0631",
            format!("this GPU computes {} wrong", plural(n as u64, "case")),
        )
        .help("report it with the lines above, and do not train on this machine")),
    }
}

fn check_text(line: &CheckLine, format: Format) -> String {
    let CheckLine { op, operands, dtype, outcome } = line;
    if format == Format::Json {
        let object = json!({
            "op": op,
            "operands": operands,
            "dtype": dtype.name(),
            "error": outcome.as_ref().ok(),
            "wrong": outcome.as_ref().err(),
        });
        return format!("{object}\n");
    }
    match outcome {
        Ok(error) => format!("{:COLUMN$}{error:.1e}  {op} of {operands}\n", "ok"),
        Err(why) => format!("{:COLUMN$}{op} of {operands}: {why}\n", "WRONG"),
    }
}

fn text(report: &Report) -> String {
    let mut res = String::new();
    let mut line = |name: &str, value: &str| {
        let lines = wrapped(value, WIDTH - COLUMN);
        for (i, it) in lines.iter().enumerate() {
            let name = if i == 0 { name } else { "" };
            // Writing to a string cannot fail.
            let _ = writeln!(res, "{name:COLUMN$}{it}");
        }
    };
    match &report.driver {
        Ok(driver) => {
            let version = driver.version.as_deref().unwrap_or("of unknown version");
            line("driver", &format!("{version}, runs CUDA up to {}", driver.cuda));
        }
        Err(error) => line("driver", &format!("missing: {error}")),
    }
    match report.gpus.as_deref() {
        Err(error) => line("GPUs", &format!("not to be used: {error}")),
        Ok([]) => line("GPUs", "none"),
        Ok(gpus) => gpus.iter().for_each(|it| line(&format!("GPU {}", it.ordinal), &gpu_text(it))),
    }
    for it in &report.links {
        line(&format!("GPU {} - {}", it.between.0, it.between.1), &link_text(it));
    }
    for it in &report.libraries {
        match &it.found {
            Ok((path, version)) => {
                line(it.name, &format!("{version}, {}, {}", it.purpose, path.display()));
            }
            Err(RunError::LibraryMissing { library, package, why: None, .. }) => {
                let how = format!("`pip install {package}`, or add its folder to LD_LIBRARY_PATH");
                line(it.name, &format!("{library} is missing ({}); {how}", it.purpose));
            }
            Err(error) => line(it.name, &format!("missing ({}): {error}", it.purpose)),
        }
    }
    if report.libraries.iter().any(|it| it.found.is_err()) {
        let folders = library::folders().iter().map(|it| it.display().to_string());
        line("looked in", &folders.collect::<Vec<String>>().join(", "));
    }
    line("tested", doctor::TESTED);
    res
}

/// Width of the first column.
const COLUMN: usize = 12;

fn gpu_text(gpu: &Gpu) -> String {
    let (total, free) = gpu.memory;
    format!(
        "{}, {} ({} free), compute capability {}.{}, {} multiprocessors",
        gpu.name,
        bytes(total),
        bytes(free),
        gpu.capability.0,
        gpu.capability.1,
        gpu.multiprocessors,
    )
}

fn link_text(link: &Link) -> String {
    let how = match link.nvlinks {
        Some(0) => "PCIe".to_string(),
        Some(n) => format!("NVLink x{n}"),
        None => "link unknown (NVML is missing)".to_string(),
    };
    let access = if link.direct { "direct access" } else { "no direct access" };
    format!("{how}, {access}")
}

fn as_json(report: &Report) -> serde_json::Value {
    let driver = match &report.driver {
        Ok(it) => json!({ "version": it.version, "cuda": it.cuda }),
        Err(error) => json!({ "missing": error.to_string() }),
    };
    let unusable = report.gpus.as_ref().err().map(|it| it.to_string());
    let gpus = report.gpus.iter().flatten().map(|it| {
        json!({
            "gpu": it.ordinal,
            "name": it.name,
            "capability": format!("{}.{}", it.capability.0, it.capability.1),
            "memory": it.memory.0,
            "free": it.memory.1,
            "multiprocessors": it.multiprocessors,
            "nvlinks": it.nvlinks,
        })
    });
    let links = report.links.iter().map(|it| {
        json!({
            "between": [it.between.0, it.between.1],
            "direct": it.direct,
            "nvlinks": it.nvlinks,
        })
    });
    let libraries = report.libraries.iter().map(|it| match &it.found {
        Ok((path, version)) => json!({
            "name": it.name,
            "purpose": it.purpose,
            "path": path.display().to_string(),
            "version": version,
        }),
        Err(error) => {
            json!({ "name": it.name, "purpose": it.purpose, "missing": error.to_string() })
        }
    });
    json!({
        "ready": report.is_ready(),
        "driver": driver,
        "gpus": gpus.collect::<Vec<_>>(),
        "gpus_unusable": unusable,
        "links": links.collect::<Vec<_>>(),
        "libraries": libraries.collect::<Vec<_>>(),
        "tested": doctor::TESTED,
    })
}
