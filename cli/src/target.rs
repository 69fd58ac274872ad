//! `--target`: the machine that times are predicted for.

use std::path::Path;

use ir::cost::Target;

use crate::input::File;
use crate::report::{Failure, Outcome};

/// The machine that times are predicted for.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    /// The machine that times are predicted for: a100, b200, cpu, h100, h200, or the file of a profile.
    #[arg(long, value_name = "NAME|FILE", default_value = "h200")]
    target: String,
}

impl TargetArgs {
    /// The profile.
    pub fn target(&self) -> Outcome<Target> {
        if let Some(target) = Target::builtin(&self.target) {
            return Ok(target);
        }
        let path = Path::new(&self.target);
        if path.extension().is_none() && !path.exists() {
            let message = format!("`--target {}` is no hardware profile", self.target);
            let help =
                format!("name one of {}, or the file of a profile", Target::NAMES.join(", "));
            return Err(Failure::new("PL0614", message).help(help));
        }
        let file = File::read(path)?;
        Target::parse(&file.text).map_err(|it| Failure::new("PL0614", it.to_string()).in_file(path))
    }
}
