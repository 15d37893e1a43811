use std::fmt;

/// One matrix of a parameter: a contiguous run of its elements, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Where it starts, in elements of the parameter.
    pub offset: usize,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
}

impl MatrixShape {
    /// Its elements: `rows · cols`.
    #[must_use]
    pub fn elem_count(&self) -> usize {
        self.rows * self.cols
    }
}

/// Which update group a parameter is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Muon, with the matrices that tile the parameter, in order.
    Muon(Vec<MatrixShape>),
    /// AdamW.
    AdamW,
}

/// Why a parameter is where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// It has two or more dimensions, and its name does not speak against it.
    Hidden,
    /// It has fewer than two dimensions.
    FewDimensions,
    /// Its name contains this: it is an embedding or an output head.
    Name(&'static str),
    /// It has no elements.
    Empty,
    /// The rule of this pattern says so.
    Rule(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hidden => f.write_str("two or more dimensions"),
            Self::FewDimensions => f.write_str("fewer than two dimensions"),
            Self::Name(part) => write!(f, "name contains {part:?}"),
            Self::Empty => f.write_str("no elements"),
            Self::Rule(pattern) => write!(f, "rule {pattern:?}"),
        }
    }
}

/// One parameter's row of the [`RoutingTable`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routed {
    /// The parameter.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its group, and its matrices there.
    pub decision: Decision,
    /// Why.
    pub reason: Reason,
    /// What looks wrong about it.
    pub warning: Option<String>,
}

/// The group of each parameter, in the order in which they were given. Made by
/// [`Rules::route`](crate::Rules::route); prints as an aligned table with its warnings below.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutingTable(Vec<Routed>);

impl RoutingTable {
    pub(crate) fn new(entries: Vec<Routed>) -> Self {
        Self(entries)
    }

    /// All parameters, in order.
    #[must_use]
    pub fn entries(&self) -> &[Routed] {
        &self.0
    }

    /// The parameter of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Routed> {
        self.0.iter().find(|routed| routed.name == name)
    }

    /// All warnings, in order.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|routed| routed.warning.as_deref())
    }
}

impl fmt::Display for RoutingTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["parameter", "shape", "group", "matrices", "reason"].map(str::to_owned);
        let mut rows = vec![header];
        rows.extend(self.0.iter().map(cells));
        let width = |column: usize| {
            rows.iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or_default()
        };
        let [name, shape, group, matrices] = [0, 1, 2, 3].map(width);
        for [a, b, c, d, reason] in &rows {
            writeln!(
                f,
                "{a:name$}  {b:shape$}  {c:group$}  {d:matrices$}  {reason}"
            )?;
        }
        for warning in self.warnings() {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}

fn cells(routed: &Routed) -> [String; 5] {
    let (group, matrices) = match &routed.decision {
        Decision::Muon(matrices) => ("muon", summary(matrices)),
        Decision::AdamW => ("adamw", "-".to_owned()),
    };
    let shape = format!("{:?}", routed.shape);
    [
        routed.name.clone(),
        shape,
        group.to_owned(),
        matrices,
        routed.reason.to_string(),
    ]
}

/// Such as `8 of 64x32`, or `64x32, 2 of 16x32`.
fn summary(matrices: &[MatrixShape]) -> String {
    let runs = matrices.chunk_by(|a, b| (a.rows, a.cols) == (b.rows, b.cols));
    let texts: Vec<_> = runs
        .map(|run| match (run.len(), run[0]) {
            (1, MatrixShape { rows, cols, .. }) => format!("{rows}x{cols}"),
            (count, MatrixShape { rows, cols, .. }) => format!("{count} of {rows}x{cols}"),
        })
        .collect();
    texts.join(", ")
}
